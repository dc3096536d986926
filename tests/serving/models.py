"""Small architectures as a server sees them, by hand."""

from __future__ import annotations

from dataclasses import replace

from sizer.base.units import GIB, MIB
from sizer.serving.architecture import FULL, SLIDING, STATE, Architecture, Layer, Weight
from sizer.serving.flags import Flags
from sizer.serving.plan import Profile

HIDDEN, VOCABULARY, LAYERS = 1024, 1000, 4


def decoder(*, layers: tuple[Layer, ...] | None = None, heads: int = 8, kv_heads: int = 4, head: int = 128) -> Architecture:
    """A decoder of four layers with 1,024 hidden elements and a vocabulary of 1,000, which is padded to 1,024."""
    weights = [Weight(name="model.embed_tokens.weight", shape=(VOCABULARY, HIDDEN))]
    for number in range(LAYERS):
        at = f"model.layers.{number}"
        weights += [
            Weight(name=f"{at}.self_attn.q_proj.weight", shape=(heads * head, HIDDEN)),
            Weight(name=f"{at}.self_attn.k_proj.weight", shape=(kv_heads * head, HIDDEN)),
            Weight(name=f"{at}.self_attn.v_proj.weight", shape=(kv_heads * head, HIDDEN)),
            Weight(name=f"{at}.self_attn.o_proj.weight", shape=(HIDDEN, heads * head)),
            Weight(name=f"{at}.mlp.gate_proj.weight", shape=(4096, HIDDEN)),
            Weight(name=f"{at}.mlp.up_proj.weight", shape=(4096, HIDDEN)),
            Weight(name=f"{at}.mlp.down_proj.weight", shape=(HIDDEN, 4096)),
            Weight(name=f"{at}.input_layernorm.weight", shape=(HIDDEN,)),
        ]
    weights.append(Weight(name="lm_head.weight", shape=(VOCABULARY, HIDDEN)))
    full = Layer(kind=FULL, elements=2 * kv_heads * head, kv_heads=kv_heads)
    return Architecture(
        name="decoder",
        model_type="llama",
        hidden=HIDDEN,
        vocabulary=VOCABULARY,
        heads=heads,
        kv_heads=kv_heads,
        head_size=head,
        intermediate=4096,
        positions=32_768,
        rotary=head,
        rotary_rows=(32_768,),
        weights=tuple(weights),
        layers=layers or (full,) * LAYERS,
    )


def attention(count: int, *, window: int = 0, elements: int = 1024) -> tuple[Layer, ...]:
    """So many layers of attention, of a window if it is not 0."""
    return (Layer(kind=SLIDING if window else FULL, elements=elements, kv_heads=4, window=window),) * count


def states(count: int, elements: int) -> tuple[Layer, ...]:
    """So many layers with a state."""
    return (Layer(kind=STATE, state_elements=elements),) * count


def flags(**changes: object) -> Flags:
    """Flags of vLLM 0.11 on a device of 24 GiB."""
    plain = Flags(
        release=(0, 11, 0),
        total_bytes=24 * GIB,
        processors=108,
        util=0.9,
        max_model_len=8192,
        max_num_seqs=256,
        max_num_batched_tokens=2048,
    )
    return replace(plain, **changes)


def profiler(asked: Flags) -> Profile:
    """A profile run that takes 1 MiB for each request and 10 KiB for each token."""
    return Profile(sampler_bytes=asked.max_num_seqs * MIB, forward_bytes=asked.max_num_batched_tokens * 10 * 1024)
