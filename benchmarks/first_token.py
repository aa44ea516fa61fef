"""Seconds from the start of a process to its first token: imports, load, compilation or Triton's cache, prefill.

    python -m benchmarks.first_token
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.rows import Rows, parser
from benchmarks.shapes import SHAPES

CHILD = """
import sys, time
begin = float(sys.argv[2])
import torch
from cuformers import AutoModelForCausalLM
imported = time.time() - begin
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], device_map="cuda")
torch.cuda.synchronize()
loaded = time.time() - begin
ids = torch.randint(0, 1000, (1, 128), device="cuda")
model.generate(ids, max_new_tokens=1, do_sample=False, eos_token_id=None, pad_token_id=0).tolist()
first = time.time() - begin
model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0).tolist()
import json
print(json.dumps(dict(import_s=imported, load_s=loaded, first_token_s=first, graph_ready_s=time.time() - begin)))
"""


def main() -> None:
    """Command line."""
    options = parser(__doc__ or "")
    options.add_argument("--shape", default="qwen3-0.6b", choices=sorted(SHAPES))
    given = options.parse_args()
    rows = Rows(given)
    from cuformers import AutoConfig, AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "model")
        config = AutoConfig.for_model(**SHAPES[given.shape])
        AutoModelForCausalLM.from_config(config, dtype="bfloat16", device_map="cuda", seed=0).save_pretrained(folder)
        environment = {**os.environ, "TRITON_CACHE_DIR": str(Path(scratch, "triton"))}
        for cache in ("empty", "warm", "warm"):
            command = [sys.executable, "-c", CHILD, str(folder), str(time.time())]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
            figures = {k: round(v, 2) for k, v in json.loads(done.stdout.splitlines()[-1]).items()}
            rows.add(what="first token", shape=given.shape, triton_cache=cache, **figures)
    rows.write()


if __name__ == "__main__":
    main()
