"""Tests of sizer.estimating."""
