"""What is known of the machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_spec.placement import machine


def test_the_processor_is_named_where_the_system_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor : 0\nmodel name\t: A Processor @ 2 GHz\n")
    monkeypatch.setattr(machine, "_CPUINFO", cpuinfo)
    assert machine.cpu_name() == "A Processor @ 2 GHz"
