"""Train a small Llama with a trainer of transformers or TRL: python trainers.py NAME, one of SCRIPTS.

Data are in memory, and each sequence has its full length.
"""

import sys
import tempfile
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

BATCH, LENGTH, NEW, WORDS = 4, 512, 64, 1000
SIZES = {
    "vocab_size": 32_000,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}


def llama(weights: str, *, saved: bool = False) -> LlamaForCausalLM:
    """Return a model on the host in a dtype, or with weights in NF4 on the device. One that is `saved` has a file.

    GRPOTrainer loads its reference from that file.
    """
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).to(getattr(torch, weights, torch.bfloat16))
    if saved or weights == "nf4":
        model.config._name_or_path = tempfile.mkdtemp()
        model.save_pretrained(model.config._name_or_path)
    return model if weights != "nf4" else in_four_bits(model.config._name_or_path)


def in_four_bits(folder: str) -> LlamaForCausalLM:
    """Return the model of a file, which bitsandbytes quantizes on the device; it is moved there again, as Accelerate does."""
    from transformers import BitsAndBytesConfig

    quantized = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    how = {"quantization_config": quantized, "dtype": torch.bfloat16, "device_map": {"": 0}}
    return LlamaForCausalLM.from_pretrained(folder, **how).to("cuda")


def tokenizer() -> Any:
    """Return a tokenizer of words, each of them one token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {f"w{number}": number + 3 for number in range(WORDS)}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    named = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, padding_side="left", **named)


def text(count: int) -> str:
    """Return a text of some words."""
    return " ".join(f"w{number % WORDS}" for number in range(count))


def tokens() -> list[list[int]]:
    """Return sequences of tokens, enough for all steps."""
    return [[3 + number % WORDS for number in range(LENGTH)] for _ in range(4 * BATCH)]


def settings(**more: Any) -> dict[str, Any]:
    """Return the arguments of all trainers: no autocast, and no files."""
    told = {
        "output_dir": tempfile.mkdtemp(),
        "report_to": [],
        "save_strategy": "no",
        "logging_strategy": "no",
        "max_steps": 3,
        "per_device_train_batch_size": BATCH,
        "gradient_checkpointing": False,
        "bf16": False,
        "dataloader_pin_memory": False,
    }
    return told | more


def plain(lora: bool = False, weights: str = "bfloat16", **more: Any) -> Trainer:
    """Return transformers' own trainer."""
    model = llama(weights)
    if lora:
        from peft import get_peft_model

        model = get_peft_model(model, adapter(lora))
    rows = [{"input_ids": torch.tensor(row), "labels": torch.tensor(row)} for row in tokens()]
    return Trainer(model, TrainingArguments(**settings(**more)), train_dataset=rows)


def sft(lora: bool = False, weights: str = "bfloat16", **more: Any) -> Trainer:
    """Return TRL's trainer of texts."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    args = SFTConfig(max_length=LENGTH, **settings(**more))
    data = Dataset.from_dict({"input_ids": tokens()})
    return SFTTrainer(llama(weights), args=args, train_dataset=data, processing_class=tokenizer(), peft_config=adapter(lora))


def dpo(lora: bool = False, weights: str = "bfloat16", **more: Any) -> Trainer:
    """Return TRL's trainer of pairs of completions, each with the prompt before it and the end after it."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    half = LENGTH // 2
    row = {"prompt": text(half), "chosen": " " + text(half - 1), "rejected": " " + text(half - 1)}
    args = DPOConfig(max_length=LENGTH, **settings(**more))
    data = Dataset.from_list([row] * (4 * BATCH))
    reference = None if lora or args.precompute_ref_log_probs else llama(weights)
    words, adapts = tokenizer(), adapter(lora)
    return DPOTrainer(llama(weights), reference, args, train_dataset=data, processing_class=words, peft_config=adapts)


def grpo(lora: bool = False, weights: str = "bfloat16", **more: Any) -> Trainer:
    """Return TRL's trainer of completions that the model makes."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    args = GRPOConfig(num_generations=2, max_completion_length=NEW, **settings(**more))
    data = Dataset.from_list([{"prompt": text(LENGTH)}] * (4 * BATCH))

    def reward(completions: list[str], **columns: object) -> list[float]:
        return [0.0] * len(completions)

    model = llama(weights, saved=args.beta > 0 and not lora)
    return GRPOTrainer(model, reward, args, data, processing_class=tokenizer(), peft_config=adapter(lora))


def orpo(lora: bool = False, weights: str = "bfloat16", **more: Any) -> Trainer:
    """Return TRL's trainer of pairs of completions without a reference."""
    from datasets import Dataset
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    half = LENGTH // 2
    row = {"prompt": text(half), "chosen": " " + text(half - 1), "rejected": " " + text(half - 1)}
    args = ORPOConfig(max_length=LENGTH, **settings(**more))
    data = Dataset.from_list([row] * (4 * BATCH))
    return ORPOTrainer(llama(weights), args=args, train_dataset=data, processing_class=tokenizer(), peft_config=adapter(lora))


def adapter(lora: bool) -> Any:
    """Return the adapter's config, if there is to be one."""
    if not lora:
        return None
    from peft import LoraConfig

    return LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")


SCRIPTS = {
    "trainer": (plain, {}),
    "trainer-lora-autocast": (plain, {"lora": True, "bf16": True}),
    "trainer-adafactor": (plain, {"optim": "adafactor"}),
    "liger-trainer": (plain, {"use_liger_kernel": True}),
    "sft": (sft, {}),
    "sft-amp": (sft, {"weights": "float32", "bf16": True}),
    "sft-autocast": (sft, {"bf16": True}),
    "sft-checkpointing": (sft, {"gradient_checkpointing": True}),
    "sft-offload": (sft, {"activation_offloading": True}),
    "sft-liger": (sft, {"use_liger_kernel": True}),
    "sft-lora": (sft, {"lora": True}),
    "sft-lora-autocast": (sft, {"lora": True, "bf16": True}),
    "sft-qlora": (sft, {"lora": True, "weights": "nf4", "bf16": True}),
    "dpo": (dpo, {}),
    "dpo-amp": (dpo, {"weights": "float32", "bf16": True}),
    "dpo-checkpointing": (dpo, {"gradient_checkpointing": True}),
    "dpo-lora": (dpo, {"lora": True}),
    "dpo-lora-autocast": (dpo, {"lora": True, "bf16": True}),
    "dpo-qlora-checkpointing": (dpo, {"lora": True, "weights": "nf4", "bf16": True, "gradient_checkpointing": True}),
    "dpo-liger": (dpo, {"use_liger_kernel": True}),
    "dpo-precomputed": (dpo, {"precompute_ref_log_probs": True}),
    "orpo": (orpo, {}),
    "orpo-autocast": (orpo, {"bf16": True}),
    "orpo-qlora": (orpo, {"lora": True, "weights": "nf4", "bf16": True}),
    "grpo": (grpo, {}),
    "grpo-accumulate": (grpo, {"beta": 0.04, "gradient_accumulation_steps": 3}),
    "grpo-amp": (grpo, {"weights": "float32", "bf16": True}),
    "grpo-reference": (grpo, {"beta": 0.04}),
    "grpo-liger-reference": (grpo, {"beta": 0.04, "use_liger_kernel": True}),
    "grpo-qlora": (grpo, {"lora": True, "weights": "nf4", "bf16": True}),
    "grpo-lora-checkpointing": (grpo, {"lora": True, "beta": 0.04, "gradient_checkpointing": True}),
}

if __name__ == "__main__":
    make, more = SCRIPTS[sys.argv[1]]
    make(**more).train()
