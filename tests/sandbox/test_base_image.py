"""The image of containers that is made of this machine's files."""

import io
import os
import re
import shutil
import tarfile
from pathlib import Path

import pytest

from agentrl.sandbox.base_image import base_image


def test_what_this_process_preloads_is_not_in_the_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # vLLM for CPUs preloads libgomp into what its process starts, wherever torch has it
    (loaded, *_) = re.findall(r"/\S+/libm\.so\S*", Path("/proc/self/maps").read_text())
    preloaded = Path(shutil.copy(loaded, tmp_path / "libpreloaded.so"))
    monkeypatch.setitem(os.environ, "LD_PRELOAD", str(preloaded))
    with tarfile.open(fileobj=io.BytesIO(base_image())) as image:
        names = image.getnames()
    assert "bin/sh" in names
    assert [name for name in names if "preloaded" in name] == []
