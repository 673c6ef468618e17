"""Boots of the server on a small Inkling, each a process of its own."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from sglang.test.test_utils import CustomTestCase

SESSION = Path(__file__).with_name("inkling_mtp_session.py")
PROBE = Path(__file__).parents[3] / "benchmark" / "fence_probe"
BOOT_LIMIT_S = 420
SWITCH = "SGLANG_ENABLE_DRAFT_EXTEND_METADATA_STAGING"


def write_model(work: Path) -> Path:
    """Write the small Inkling; returns its folder."""
    from inkling_mtp_staging.tiny_inkling import Recipe, Shape
    from inkling_mtp_staging.tiny_inkling.checkpoint import write_checkpoint

    model = work / "model"
    write_checkpoint(model, Recipe(Shape()))
    return model


def release_path(work: Path) -> str:
    """A folder with the unpatched sglang: a copy of the installed one, reverted."""
    given = os.environ.get("MTP_E2E_RELEASE")
    if given:
        return given
    import sglang

    from inkling_mtp_staging.cli import main as inkling_mtp_staging

    package = Path(sglang.__file__).parent
    root = work / "release"
    shutil.copytree(package, root / "sglang")
    for metadata in package.parent.glob("sglang-*.dist-info"):
        shutil.copytree(metadata, root / metadata.name)
    assert inkling_mtp_staging(["revert", "--root", str(root)]) == 0
    return str(root)


def reference(name, args, release):
    """Side, arguments, folder of sglang and environment of what a setting is compared
    with."""
    if "triton" in name:
        return "reference", args, None, {SWITCH: "0"}
    return "reference", args, release, {}


def boot_session(model, logs, name, side, args, sglang_path, variables):
    """Results of one engine, or the end of its log if it failed."""
    for old in logs.glob(f"{name}.{side}.*"):
        old.unlink()  # an earlier run's
    out, log = (logs / f"{name}.{side}.{suffix}" for suffix in ("json", "log"))
    paths = [sglang_path, str(PROBE), os.environ.get("PYTHONPATH")]
    env = {**os.environ, **variables}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    env["FENCE_PROBE_OUT"] = str(logs / f"{name}.{side}.fences")
    command = [sys.executable, str(SESSION), "--model", str(model)]
    with log.open("w") as stream:
        try:
            ended = subprocess.run(
                [*command, "--out", str(out), *args],
                env=env,
                stdout=stream,
                stderr=stream,
                timeout=BOOT_LIMIT_S,
            )
            failure = f"exit code {ended.returncode}"
        except subprocess.TimeoutExpired:
            failure = f"no end within {BOOT_LIMIT_S} s"
    if not out.exists():
        return {"failure": f"{failure}: {log.read_text()[-3000:]}"}
    result = json.loads(out.read_text())
    print(f"MTP_E2E {name} {side} {json.dumps(result)[:1500]}", flush=True)
    return result


class BootsTestCase(CustomTestCase):
    """Boots of the settings that MTP_E2E_SETTINGS picks by name, separated by commas;
    without it of all. Their logs stay in MTP_E2E_LOGS, if given."""

    all_settings = {}  # name -> arguments of the session

    @classmethod
    def setUpClass(cls):
        cls.work = Path(tempfile.mkdtemp(prefix="mtp-boots-"))
        cls.addClassCleanup(shutil.rmtree, cls.work, ignore_errors=True)
        cls.logs = Path(os.environ.get("MTP_E2E_LOGS", cls.work))
        cls.logs.mkdir(parents=True, exist_ok=True)
        wanted = os.environ.get("MTP_E2E_SETTINGS")
        names = wanted.split(",") if wanted else cls.all_settings
        cls.settings = {n: a for n, a in cls.all_settings.items() if n in names}
        cls.model, cls.release = write_model(cls.work), release_path(cls.work)
        cls.results = {}  # (name, side) -> what the session said

    @classmethod
    def boot(cls, *boot):
        return boot_session(cls.model, cls.logs, *boot)

    def result(self, name, side):
        result = self.results[name, side]
        self.assertNotIn("failure", result, f"{name}, {side}")
        return result

    @classmethod
    def picked(cls, settings):
        return [name for name in settings if name in cls.settings]
