"""Which kernel a composite operator becomes on a device.

On meta tensors a composite operator takes its generic path, and the answer is wrong by factors. Each table here maps an
operator to the function that calls what the device would call; the device installs them above autograd, on the dispatch
key AutogradMeta, so that calls from Python and from inside PyTorch's own C++ are treated alike.
"""
