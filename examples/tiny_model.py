"""A tiny Qwen3-shaped language model and real text for it, made on the spot.

Nothing is downloaded: the text is Python's own language reference, the topics that ``help()`` shows
(module ``pydoc_data.topics`` of every CPython), and the weights are random.

    python examples/tiny_model.py FOLDER

writes FOLDER/model (weights, configuration, tokenizer) and FOLDER/data/train.jsonl, as TRL's
command line wants them.
"""

import argparse
import json
import pydoc_data.topics
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

TEXT_SOURCE = "Python's language reference, as help() shows it (pydoc_data.topics)"


def python_reference() -> list[str]:
    """The topics of Python's language reference, one text each, in alphabetical order."""
    topics = pydoc_data.topics.topics
    return [topics[name] for name in sorted(topics)]


def reference_bytes() -> torch.Tensor:
    """The whole reference as UTF-8 bytes, so that a model over bytes needs no tokenizer; int64."""
    text = "\n\n".join(python_reference()).encode()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def qwen3_config(
    *,
    vocab_size: int = 256,
    hidden_size: int = 128,
    num_hidden_layers: int = 2,
    num_attention_heads: int = 14,
    num_key_value_heads: int = 2,
    head_dim: int = 32,
    **overrides,
) -> Qwen3Config:
    """Qwen3's shape, small: grouped query heads, RMSNorm in every block and on queries and keys.

    14 query heads on 2 key/value heads is the ratio of Qwen2.5-0.5B.
    """
    return Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=num_attention_heads,
        num_key_value_heads=num_key_value_heads,
        head_dim=head_dim,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        **overrides,
    )


def save_model(folder: Path, config: Qwen3Config, seed: int = 0) -> None:
    """Writes a model with random weights, so that several runs start from the same ones."""
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


def byte_pair_tokenizer(texts: list[str], vocab_size: int = 512) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer trained on ``texts``, with the tokens that TRL asks for."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<pad>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def write_model_and_data(folder: Path, num_texts: int = 64, text_length: int = 600) -> None:
    """Writes FOLDER/model and FOLDER/data/train.jsonl: ``num_texts`` openings of topics."""
    texts = [topic[:text_length] for topic in python_reference()[:num_texts]]
    tokenizer = byte_pair_tokenizer(texts)
    config = qwen3_config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_attention_heads=8,
        head_dim=16,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    save_model(folder / "model", config)
    tokenizer.save_pretrained(folder / "model")
    (folder / "data").mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"text": text}) for text in texts]
    (folder / "data" / "train.jsonl").write_text("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    write_model_and_data(folder)
    print(f"wrote {folder / 'model'} and {folder / 'data'}")


if __name__ == "__main__":
    main()
