"""What meta tensors do differently from any device's, put right: constructors, autocast, strides, in-place accumulation."""
