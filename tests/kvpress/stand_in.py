"""Lays a tiny random Llama where the hub client looks for the one that kvpress's tests name.

`python tests/kvpress/stand_in.py FOLDER` makes FOLDER a hub cache (HF_HUB_CACHE): same
architecture and sizes as the tests count on, no weight of anybody's. Not a test itself.
"""

import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

NAMES = ("MaxJeblick/llama2-0b-unit-test", "maxjeblick/llama2-0b-unit-test")
REVISION = "0" * 40


def main(cache: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=3000,
        hidden_size=12,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        initializer_range=0.3,
    )
    model = LlamaForCausalLM(config)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {c: 3 + n for n, c in enumerate(alphabet)}
    filler = {f"<{n}>": n for n in range(len(vocabulary), config.vocab_size)}
    bytes_only = Tokenizer(models.BPE(vocab=vocabulary | filler, merges=[], unk_token="<unk>"))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bytes_only, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    for name in NAMES:
        folder = cache / f"models--{name.replace('/', '--')}"
        snapshot = folder / "snapshots" / REVISION
        model.save_pretrained(snapshot)
        tokenizer.save_pretrained(snapshot)
        (folder / "refs").mkdir(parents=True, exist_ok=True)
        (folder / "refs" / "main").write_text(REVISION)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
