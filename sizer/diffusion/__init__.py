"""Diffusion pipelines: diffusers' own classes and `pipe.__call__`, traced on meta with its own offloading.

    preset or pasted files --bundle--> Bundle --building--> pipeline on the host --placing--> device --work--> Tape

`bundle` reads model_index.json and the config of each part, and imports no torch. `building` makes the parts of diffusers and
transformers, cast as `from_pretrained(torch_dtype=...)` leaves them, with tokenizers without a vocabulary. `placing` moves,
offloads and quantizes them by diffusers' own functions. `work` calls the pipeline with two denoising steps and marks its
phases: each part, from its first use on. `repeated_calls` logs equal blocks and tiles without running them. `training` trains
its denoiser, `encoding` are the inputs that a step encodes. A new pipeline is a file in `presets`; one with the same parts as
another names that one (`of`) and the differences.
"""
