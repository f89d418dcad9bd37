/* Loaded before the Vulkan loader: once the file of LOSE_DEVICE exists, the device is lost. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef void (*Function)(void);
typedef Function (*GetAddress)(void *, const char *);
typedef int (*Submit)(void *, unsigned, const void *, void *);
static GetAddress real_instance, real_device;
static Submit real_submit;
enum { DEVICE_LOST = -4 };

static int submit(void *queue, unsigned count, const void *batches, void *fence) {
    const char *path = getenv("LOSE_DEVICE");
    return path && access(path, F_OK) == 0 ? DEVICE_LOST : real_submit(queue, count, batches, fence);
}

static Function chosen(const char *name, Function found) {
    if (strcmp(name, "vkQueueSubmit") == 0) {
        real_submit = (Submit)found;
        return (Function)submit;
    }
    return found;
}

static Function device_address(void *device, const char *name) {
    return chosen(name, real_device(device, name));
}

Function vkGetInstanceProcAddr(void *instance, const char *name) {
    if (!real_instance) real_instance = (GetAddress)dlsym(RTLD_NEXT, "vkGetInstanceProcAddr");
    Function found = real_instance(instance, name);
    if (strcmp(name, "vkGetDeviceProcAddr") == 0) {
        real_device = (GetAddress)found;
        return (Function)device_address;
    }
    return chosen(name, found);
}
