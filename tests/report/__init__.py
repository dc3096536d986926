"""Tests of sizer.report."""
