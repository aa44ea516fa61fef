"""Where tests find the optional shared data; they skip what needs it when it is absent."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHARED = Path(os.environ.get("CUFORMERS_SHARED", ROOT.parent / "shared"))
DATA = Path(__file__).resolve().parent / "data"
