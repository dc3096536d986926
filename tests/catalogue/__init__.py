"""Tests of sizer.catalogue."""
