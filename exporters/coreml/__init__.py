"""Write Core ML packages on any system: the program is built from named tensors, without torch."""

from edge_spec.core.entry_points import quiet_import

with quiet_import():
    from edge_spec.exporters.coreml.export import CoreMlExporter

__all__ = ["CoreMlExporter"]
