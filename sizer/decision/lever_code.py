"""Lines of PyTorch for each lever. They run unchanged around a training or inference loop."""

from __future__ import annotations

from collections.abc import Callable

from sizer.base.versions import allocator_variable, installed_version, parse_version
from sizer.catalogue.gpu_keys import find_gpu
from sizer.catalogue.modes import MODES
from sizer.catalogue.optimizers import OPTIMIZERS
from sizer.catalogue.recipes import GRPO, TORCH, cached_texts, chunks_of
from sizer.catalogue.weights import WEIGHTS
from sizer.query.request import Request

Code = Callable[[Request], str]


def fused(request: Request) -> str:
    name = OPTIMIZERS[request.optimizer].class_name or "SGD"
    return f"optimizer = torch.optim.{name}(model.parameters(), fused=True)"


def accumulate(request: Request) -> str:
    (batch,) = request.batches
    if request.objective == GRPO:
        batches = f"per_device_train_batch_size={batch}, gradient_accumulation_steps={request.accumulate}"
        return f"from trl import GRPOConfig\nargs = GRPOConfig({batches})"
    if request.is_pipeline:
        return f"images = []  # instead of one call\nfor _ in range(calls):\n    images += pipe([prompt] * {batch}).images"
    if MODES[request.mode].generates:
        return f"for part in inputs.split({batch}):\n    outputs.append(model.generate(part, max_new_tokens={request.new}).cpu())"
    if not MODES[request.mode].trains:
        return f"for part in inputs.split({batch}):\n    outputs.append(model(part).cpu())"
    return (
        f"for part, target in zip(inputs.split({batch}), targets.split({batch})):\n"
        "    (loss_fn(model(part), target) * len(part) / len(inputs)).backward()\n"
        "optimizer.step(); optimizer.zero_grad()"
    )


def cached_gradients(request: Request) -> str:
    """Return sentence-transformers' loss with gradient caching."""
    texts = cached_texts(request.objective)
    return (
        "from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss\n"
        f"loss = CachedMultipleNegativesRankingLoss(model, mini_batch_size={texts})"
    )


def without_reference(request: Request) -> str:
    """Return the option of TRL's trainer that needs no reference model."""
    if request.objective == GRPO:
        return "from trl import GRPOConfig\nargs = GRPOConfig(beta=0.0)"
    name = f"{request.objective.upper()}Config"
    return f"from trl import {name}\nargs = {name}(precompute_ref_log_probs=True)"


def new_tokens(request: Request) -> str:
    """Return the option that limits the tokens of a generation, or of TRL's completions."""
    if request.objective == GRPO:
        return f"from trl import GRPOConfig\nargs = GRPOConfig(max_completion_length={request.new})"
    return f"model.generate(..., max_new_tokens={request.new})"


def in_backward(request: Request) -> str:
    """Return the hooks that step each parameter by itself (docs.pytorch.org, "optimizer step in backward")."""
    row = OPTIMIZERS[request.optimizer]
    return (
        f"import {row.module}\n"
        f"each = {{p: {row.module}.{row.class_name}([p]) for p in model.parameters() if p.requires_grad}}\n"
        "def step(p): each[p].step(); each[p].zero_grad()\n"
        "for p in each: p.register_post_accumulate_grad_hook(step)  # in the loop loss.backward() is all"
    )


def chunked_loss(request: Request) -> str:
    """Return PyTorch's loss over chunks of tokens, or torchtune's where PyTorch has none."""
    hidden = "hidden, head = model.base_model(input_ids).last_hidden_state, model.get_output_embeddings()\n"
    if request.loss == TORCH:
        return (
            f"{hidden}"
            "loss = torch.nn.functional.linear_cross_entropy(\n"
            "    hidden[:, :-1].flatten(0, 1), head.weight, labels[:, 1:].flatten(), options=torch.nn.LinearCrossEntropyOptions())"
        )
    chunks = chunks_of(request.loss)
    return (
        "from torchtune.modules.loss import CEWithChunkedOutputLoss\n"
        f"{hidden}"
        f"loss = CEWithChunkedOutputLoss({chunks})([head(part) for part in hidden[:, :-1].chunk({chunks}, dim=1)], labels[:, 1:])"
    )


def checkpoint(request: Request) -> str:
    if request.is_of_pipeline:
        return "model.enable_gradient_checkpointing()  # of the denoiser: pipe.transformer, or pipe.unet"
    if request.source in ("hf", "hub", "config"):
        return 'model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})'
    return (
        "from torch.utils.checkpoint import checkpoint\n"
        "for block in blocks: x = checkpoint(block, x, use_reentrant=False)  # in the model's forward"
    )


def budget(request: Request) -> str:
    return (
        "import torch._functorch.config  # before the first compiled call\n"
        f"torch._functorch.config.activation_memory_budget = {request.budget:g}"
    )


def cast(dtype: str) -> Code:
    def code(request: Request) -> str:
        if request.is_pipeline:
            return f"pipe = DiffusionPipeline.from_pretrained(name, torch_dtype=torch.{dtype})"
        return f"model = model.to(torch.{dtype})\ninputs = inputs.to(torch.{dtype})  # if they are floating point"

    return code


def autocast(dtype: str) -> Code:
    def code(request: Request) -> str:
        kind = find_gpu(request.gpu).backend
        lines = f'with torch.autocast("{kind}", dtype=torch.{dtype}):\n    loss = loss_fn(model(inputs), targets)'
        if dtype == "float16":
            lines += f'\nscaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()  # torch.amp.GradScaler("{kind}")'
        return lines

    return code


def quantized(weights: str) -> Code:
    settings = {name: value for name, value in WEIGHTS[weights].config.items() if name != "quant_method"}
    written = ", ".join(f"{name}={value!r}" for name, value in settings.items())
    return lambda request: (
        f"from transformers import BitsAndBytesConfig\nconfig = BitsAndBytesConfig({written})\n"
        "model = type(model).from_pretrained(name, quantization_config=config)"
    )


def lora(request: Request) -> str:
    if request.is_of_pipeline:
        return (
            "from peft import LoraConfig\n"
            "model.requires_grad_(False)  # the denoiser: pipe.transformer, or pipe.unet\n"
            f"model.add_adapter(LoraConfig(r=16, lora_alpha=16, target_modules={list(request.adapter_targets)!r}))"
        )
    return (
        "from peft import LoraConfig, get_peft_model\n"
        'model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))'
    )


def quantized_lora(request: Request) -> str:
    library, kind, named, folder = "transformers", "AutoModelForCausalLM", "AutoModelForCausalLM, BitsAndBytesConfig", ""
    if request.is_of_pipeline:
        library, kind, named, folder = "diffusers", "type(model)", "BitsAndBytesConfig", ', subfolder="transformer"'  # or unet
    first, adapter = lora(request).split("\n", 1)
    return (
        f"{first}, prepare_model_for_kbit_training\n"
        f"from {library} import {named}\n"
        'config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, '
        "bnb_4bit_compute_dtype=torch.bfloat16)\n"
        f"model = {kind}.from_pretrained(name{folder}, quantization_config=config)\n"
        "model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)\n"
        f"{adapter}"
    )


def expandable(request: Request) -> str:
    variable = allocator_variable(parse_version(request.torch) if request.torch else installed_version())
    return f'import os  # before the first CUDA call\nos.environ["{variable}"] = "expandable_segments:True"'


def sequence(request: Request) -> str:
    length = request.sequence_length
    return f"inputs = inputs[:, :{length}]  # or truncation=True, max_length={length} in the tokenizer"


def image(request: Request) -> str:
    height, width = request.image_size or (0, 0)
    return f"inputs = torch.nn.functional.interpolate(inputs, size=({height}, {width}))  # or Resize in the data loader"
