"""What learns while idle, beside a program of another session that keeps a core busy: its share.

    python benchmarks/priority.py [--seconds 3]

Both are bound to one core. Prints the share of it that the second one got, with the lowest priority
within the session that it was started in, and as `give_way` lowers it. Linux alone.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

_BUSY = """
import os, sys, time
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
#GIVES_WAY
sys.stdin.readline()
end_s, began_s = time.monotonic() + float(sys.argv[1]), time.process_time()
while time.monotonic() < end_s:
    pass
print(time.process_time() - began_s)
"""
WAYS = {
    "nobody gives way": "",
    "lowest priority in its session": "os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0)); "
    "os.nice(19)",
    "give_way": "from edge_spec.placement.priority import LOWEST, give_way; give_way(LOWEST)",
}


def share(way: str, seconds: float) -> float:
    """The part of a core that the one that gives way got beside the other."""
    pair = []
    for code in (_BUSY, _BUSY.replace("#GIVES_WAY", way)):
        command = [sys.executable, "-c", code, str(seconds)]
        # A session of its own is what a program has that was started in another terminal.
        pair.append(
            subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session="give_way" not in code,
            )
        )
    for each in pair:
        assert each.stdin is not None
        each.stdin.write("begin\n")
        each.stdin.flush()
    return float(pair[1].communicate()[0]) / seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=3.0)
    arguments = parser.parse_args()
    for name, way in WAYS.items():
        print(f"{name}: {share(way, arguments.seconds):.0%} of a core")


if __name__ == "__main__":
    main()
