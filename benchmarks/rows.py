"""What every benchmark writes: one JSON object a measurement, with where and on what it was made."""

import argparse
import json
import subprocess
import time
from pathlib import Path
from typing import Any

import torch


def machine(commit: str | None) -> dict[str, Any]:
    """GPU, driver, versions and commit of this run."""
    import triton

    from cuformers.cuda import driver

    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": driver.read().version,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": commit or _head(),
        "date": time.strftime("%Y-%m-%d"),
    }


class Rows:
    """Collects rows, prints each as it comes, and writes them at the end."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.common = machine(options.commit)
        self.out = Path(options.out) if options.out else None
        self.rows: list[dict[str, Any]] = []

    def add(self, **row: Any) -> None:
        """One measurement."""
        self.rows.append({**row, **self.common})
        print(json.dumps(row), flush=True)

    def write(self) -> None:
        """Appends all rows to the file of --out, one a line."""
        if self.out is not None:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            with open(self.out, "a") as file:
                file.writelines(json.dumps(row) + "\n" for row in self.rows)


def parser(description: str) -> argparse.ArgumentParser:
    """A parser with the options of every benchmark."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--out", help="file to append JSON rows to")
    options.add_argument("--commit", help="commit that is measured; asked of git by default")
    return options


def _head() -> str | None:
    try:
        done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
