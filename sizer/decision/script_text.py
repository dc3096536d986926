"""The text of a script, with gaps: its head, the work by mode, how it is measured, and its end on one device."""

HEAD = '''\
"""{title}

Written by Sizer for {query}

    {command}
"""

import json
import {arguments}
import tempfile

{imports}

{device}
dtype = torch.{weights}


def build_model():
{build}    return model


def make_batch():
    args = {args}
    kwargs = {kwargs}
    targets = {targets}
    return args, kwargs, targets


'''
TRAINING = """\
def loss_of(model, args, kwargs, targets):
{loss}

def work():
{model}{optimizers}    with torch.device(device):
        batch = make_batch()
    start()
    for _ in range(2):
{step}


"""
INFERENCE = """\
def work():
    model = build_model(){placed}.eval()
    with torch.device(device):
        args, kwargs, _ = make_batch()
    start()
    for _ in range(2):
{step}


"""
GENERATION = """\
def work():
    model = build_model(){placed}.eval()
    with torch.device(device):
        _, kwargs, _ = make_batch()
    model.generation_config = GenerationConfig({options})
    start()
    with {context}:
        model.generate(**kwargs, generation_config=model.generation_config)


"""
TAIL = """\
def start():
    with torch.profiler.record_function("start"):
        if device.startswith("cuda"):
            torch.cuda.reset_peak_memory_stats()


def measure():
    if device.startswith("cuda"):
        work()
        return {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
    if device == "mps":
        work()
        return {"driver": torch.mps.driver_allocated_memory()}
    torch.set_num_threads(1)  # as the estimate has it: with more, the CPU's kernels hold buffers for each
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        work()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profile.export_chrome_trace(file.name)
        events = json.load(open(file.name, encoding="utf-8"))["traceEvents"]
    began = next(event["ts"] for event in events if event["name"] == "start")
    memory = [event for event in events if event["name"] == "[memory]" and event["ts"] >= began]
    return {"allocated": max(event["args"]["Total Allocated"] for event in memory)}


"""
MAIN_BESIDE = """\
ESTIMATED = {figures}  # bytes on the {gpu}


if __name__ == "__main__":
    for name, size in measure().items():
        estimate = ESTIMATED.get(name)
        beside = f", estimated {{estimate:,}} bytes ({{100 * (estimate - size) / size:+.2f}} %)" if estimate and size else ""
        print(f"{{name}} at the peak: {{size:,}} bytes ({{size / 2**30:.2f}} GiB){{beside}}")
"""
MAIN = """\
if __name__ == "__main__":
    for name, size in measure().items():
        print(f"{name} at the peak: {size:,} bytes ({size / 2**30:.2f} GiB)")
"""
