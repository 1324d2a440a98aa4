"""Peer of `rollout.py` and `batch_mix.py`: transformers' `generate`, once for each batch on all that came before.

    python bench/peer_turns.py '[[[PREFIX, ...], [NEW, ...]], ...]'

Each batch is a list of prefix lengths and one of new tokens; it runs until its longest row has its tokens, and no cache
outlives a batch. Prefixes are padded on the left. The same small random Qwen3 as the peers' scripts have, float32 on a
CPU. One JSON line: seconds for all batches, compilation and loading left out, and the tokens that were asked for.
"""

import json
import sys
import time

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM


def main() -> None:
    batches = json.loads(sys.argv[1])
    torch.set_num_threads(2)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        tie_word_embeddings=True,
        rope_theta=1e6,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = Qwen3ForCausalLM(config).eval()

    def run(prefixes: list[int], new: list[int]) -> None:
        width = max(prefixes)
        tokens = torch.randint(5, 8000, (len(prefixes), width))
        mask = (torch.arange(width)[None] >= width - torch.tensor(prefixes)[:, None]).long()
        count = max(new)
        with torch.inference_mode():
            out = model.generate(
                tokens * mask,
                attention_mask=mask,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=count,
                min_new_tokens=count,
            )
        assert out.shape == (len(prefixes), width + count)

    run([4] * len(batches[0][0]), [2])
    begin = time.perf_counter()
    for prefixes, new in batches:
        run(prefixes, new)
    seconds = time.perf_counter() - begin
    print(json.dumps({"peer": "hf_turns", "s": seconds, "tokens": sum(sum(new) for _, new in batches)}))


if __name__ == "__main__":
    main()
