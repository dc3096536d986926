"""Generate tokens, read the completions up to their ends, and save weights of the host: python generating.py FOLDER."""

import sys

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = {"vocab_size": 8000, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
END = 2
model = LlamaForCausalLM(LlamaConfig(eos_token_id=END, pad_token_id=0, **SIZES))
kept = {"norm": torch.arange(4.0)}
save_file(kept, f"{sys.argv[1]}/host.safetensors")
print("loaded", load_file(f"{sys.argv[1]}/host.safetensors")["norm"].tolist())
model = model.cuda().eval()
save_file({"norm": model.model.norm.weight}, f"{sys.argv[1]}/device.safetensors")
prompts = torch.ones(4, 16, dtype=torch.long, device="cuda")
for samples in (False, True):
    found = model.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=12, do_sample=samples)
    completions = found[:, 16:]
    is_end = completions == END
    ends = torch.full((4,), 12, device="cuda")
    ends[is_end.any(dim=1)] = is_end.int().argmax(dim=1)[is_end.any(dim=1)]
    mask = torch.arange(12, device="cuda").expand(4, -1) <= ends.unsqueeze(1)
    ids = [row[chosen].tolist() for row, chosen in zip(completions.cpu(), mask.cpu(), strict=True)]
    print("lengths", [len(row) for row in ids], "first", [row[0] for row in ids], completions[:, -1].tolist())
beams = model.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=12, num_beams=3)
print("beams", list(beams.shape), torch.cuda.max_memory_allocated())
