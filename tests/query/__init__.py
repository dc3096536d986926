"""Tests of sizer.query."""
