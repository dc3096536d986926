"""Print what torch.cuda answers and what pickle keeps, a line for each, the same on both routes."""

import pickle

import torch

x = torch.randn(4, 4, device="cuda")
stream, event = torch.cuda.Stream(priority=-1), torch.cuda.Event(enable_timing=True)
event.record()
print(torch.cuda.Stream.priority_range(), stream.device, isinstance(stream, torch.cuda.streams.Stream))
print(event.elapsed_time(event), event.device, torch.cuda.ExternalStream(stream.cuda_stream).cuda_stream > 0)
torch.cuda.manual_seed(5)
print(torch.cuda.initial_seed(), torch.Generator(device="cuda").device, torch.accelerator.current_device_index())
address = torch.cuda.caching_allocator_alloc(2**20)
print(torch.cuda.memory_allocated(), torch.cuda.memory_stats_as_nested_dict()["allocated_bytes"]["all"]["peak"])
torch.cuda.caching_allocator_delete(address)
half = x[None, None].half()
params = torch.backends.cuda.SDPAParams(half, half, half, None, 0.0, False, False)
print(torch.backends.cuda.can_use_flash_attention(params), torch.backends.cuda.cufft_plan_cache.max_size)
print(torch.cuda.get_device_properties(0).pci_bus_id, x.untyped_storage().device, torch.cuda.get_per_process_memory_fraction())
generator, other = torch.Generator(device="cuda").manual_seed(7), torch.cuda.default_generators[0]
other.set_state(torch.cuda.get_rng_state())
other.graphsafe_set_state(generator.set_offset(4).clone_state())
print(generator.get_state().tolist(), other.get_state().tolist(), other.initial_seed(), other.get_offset())
print(pickle.loads(pickle.dumps(torch.ones(3))).tolist())
with torch.device("meta"):
    print(torch.tensor([]).device, torch.as_tensor([1.0]).device)
    angles = 10000.0 ** -torch.arange(0, 64, 2).float()
torch.cuda.reset_peak_memory_stats()
positions = torch.arange(2048, device=angles.device)  # on no device, as the tensor whose device is named
made = [torch.outer(positions, angles), torch.tensor([1.0, 2.0], device=angles.device), torch.zeros(99, device=angles.device)]
print({str(tensor.device) for tensor in made}, torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated())
module = torch.nn.Linear(4, 4).cuda()
with torch.inference_mode():
    module.half()
    print(torch.arange(4).type_as(x).device, module.weight.dtype, module.weight.is_inference())
try:
    x.numpy()
except TypeError as error:
    print(error)
