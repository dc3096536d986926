"""Calls of a transformers model with the tensors of an example.

Most models take the tensors unchanged. A few take transformers' own objects, which are made here as its processors make them:
the atoms of a protein as one bundle, a video as a session with a memory.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from sizer.architecture.blueprint import Example
from sizer.architecture.examples.example_spec import takes
from sizer.base.errors import TraceError

# Error of transformers if features and placeholder tokens differ. `text_with_placeholders` writes one placeholder per feature, so
# their width differs: the config's encoder does not fit its text model.
MISFIT = re.compile(r"(Image|Video|Audio) features and \w+ tokens do not match")
MEDIA = {"Image": "images", "Video": "videos", "Audio": "audio"}

Call = Callable[[nn.Module, dict[str, Any]], object]


def call(module: nn.Module, example: Example) -> object:
    """Return the module's output for the example. Raises TraceError if the parts of its config do not fit together."""
    own = next((make for name, make in CALLS.items() if takes(type(module), name)), None)
    try:
        return module(*example.args, **example.kwargs) if own is None else own(module, example.kwargs)
    except ValueError as error:
        found = MISFIT.match(str(error))
        if found is None:
            raise
        raise TraceError(
            f"the encoder of {MEDIA[found[1]]} in this config yields features of another width than its text takes "
            f"(transformers: {error})",
            todo="use the config.json of a published checkpoint",
        ) from error


def fold(module: nn.Module, inputs: dict[str, Any]) -> object:
    """Return the output of ESMFold2, called with the tensors of the atoms as one `EsmFold2AtomInputs`."""
    bundle = _class_of(module, "atom_inputs")
    atoms = {field.name: inputs[field.name] for field in dataclasses.fields(bundle)}
    rest = {name: value for name, value in inputs.items() if name not in atoms}
    return module(atom_inputs=bundle(**atoms), **rest)


def track(module: nn.Module, inputs: dict[str, Tensor]) -> object:
    """Return the output of SAM 2 Video or a related model: a session over the frames [F, 3, height, width].

    A point on each object [N, 1, 1, 2] is given in the first frame. Every frame runs after the previous one, as in
    `propagate_in_video_iterator`; the output is the last one's. The session keeps the frames and their features on the model's
    device (`init_video_session` of the processors).
    """
    frames, points = inputs["frames"], inputs["input_points"]
    session = _class_of(module, "inference_session")(
        video=frames,
        video_height=frames.shape[-2],
        video_width=frames.shape[-1],
        inference_device=frames.device,
        inference_state_device=frames.device,
        video_storage_device=frames.device,
        dtype=frames.dtype,
    )
    for number in range(len(points)):
        given = {
            "point_coords": points[number : number + 1],
            "point_labels": inputs["input_labels"][number : number + 1],
        }
        session.add_point_inputs(session.obj_id_to_idx(number), 0, given)
    session.obj_with_new_inputs = list(session.obj_ids)
    output = None
    for number in range(len(frames)):
        output = module(inference_session=session, frame_idx=number)
    return output


def complete_llama4(module: nn.Module) -> None:
    """Add an empty `image_outputs` field to the text model's output of Llama 4, because its own forward then reads it.

    transformers 5.24, modeling_llama4.py, Llama4ForConditionalGeneration.forward: `outputs.image_outputs` of a
    MoeCausalLMOutputWithPast, which has no such field.
    """

    def complete(text_model: nn.Module, args: object, output: Any) -> None:
        if not hasattr(output, "image_outputs"):
            output.image_outputs = None

    module.language_model.register_forward_hook(complete)


def _class_of(module: nn.Module, parameter: str) -> type:
    """Return the class in the annotation of a parameter of the module's forward."""
    return inspect.signature(type(module).forward).parameters[parameter].annotation


# By class, a fix of an error of transformers that would make every step fail.
REPAIRS: dict[str, Callable[[nn.Module], None]] = {"Llama4ForConditionalGeneration": complete_llama4}
REPAIRED = (
    "transformers {version} fails in its own forward pass of {name} (AttributeError: image_outputs); the estimate is of the step "
    "with that line mended."
)

CALLS: dict[str, Call] = {"atom_inputs": fold, "inference_session": track}
