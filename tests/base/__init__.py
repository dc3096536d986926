"""Tests of sizer.base."""
