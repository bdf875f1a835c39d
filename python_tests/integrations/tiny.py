"""Models, tokenizer and prompts small enough to train for a few steps in a second."""

from __future__ import annotations

from typing import Any

import torch


def causal_lm(name: str = "Qwen2", *, bias: bool = False, **options: Any) -> Any:
    """A random causal language model of a family of transformers, with 64 tokens; the same for the same options."""
    import transformers

    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 1,
        "tie_word_embeddings": False,
    }
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**sizes | options)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)  # entropies well below the uniform distribution's
    if bias:
        head = model.get_output_embeddings()
        head.bias = torch.nn.Parameter(torch.randn(head.out_features))
    return model


def tokenizer() -> Any:
    """Words w0 to w61 after padding (0) and end (1)."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", *(f"w{i}" for i in range(62))]
    words_to_ids = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    words_to_ids.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words_to_ids, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def text(seed: int, words: int) -> str:
    return " ".join(f"w{seed * i % 59}" for i in range(1, words + 1))


def dataset(columns: dict[str, list[Any]]) -> Any:
    """A `datasets.Dataset`; its fingerprint, which some versions of pyarrow cannot give, is made up."""
    from datasets import Dataset
    from datasets.table import InMemoryTable

    return Dataset(InMemoryTable.from_pydict(columns), fingerprint="-".join(columns))
