"""What is known of the processor."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_spec.placement import processor


def test_the_processor_is_named_where_the_system_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor : 0\nmodel name\t: A Processor @ 2 GHz\n")
    monkeypatch.setattr(processor, "_CPUINFO", cpuinfo)
    assert processor.cpu_name() == "A Processor @ 2 GHz"
