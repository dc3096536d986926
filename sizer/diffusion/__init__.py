"""Diffusion pipelines: diffusers' own classes and `pipe.__call__`, traced on meta with its own offloading.

    preset or pasted files --bundle--> Bundle --building--> pipeline on the host --placing--> device --work--> Tape

`bundle` reads model_index.json and the config of each part, and imports no torch. `building` makes the parts of diffusers and
transformers, cast as `from_pretrained(torch_dtype=...)` leaves them, with tokenizers that have no vocabulary. `placing` moves,
offloads and quantises them by diffusers' own functions. `work` calls the pipeline with two denoising steps and marks its phases:
each part, from its first use on. `training` trains its denoiser, `encoding` is what a step encodes of its inputs. A new pipeline
is a file in `presets`; one of the same parts as another names that one (`of`) and what differs.
"""
