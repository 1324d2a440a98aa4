"""Two processes save one model that lies on the devices of both: `python save_pair.py PROCESS PORT SOURCE OUT`.

Prints one JSON line: what verification counted, and what a second attempt at the same directory ended in.
"""

import json
import sys

import jax

from models.qwen3 import CheckpointError, load_hf, save_hf, verify_hf
from models.qwen3.sharding import make_mesh


def main(process: str, port: str, source: str, out: str) -> None:
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(process))
    model = load_hf(source, make_mesh(fsdp=2, tp=2))
    assert not model.layers.q_proj[...].is_fully_addressable
    save_hf(model, out, like=source)
    verified = verify_hf(model, out)
    try:
        save_hf(model, out)
        again = None
    except CheckpointError as error:
        again = str(error)
    print(json.dumps({"verified": verified, "again": again}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
