"""Tests of sizer.allocator."""
