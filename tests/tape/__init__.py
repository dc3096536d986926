"""Tests of sizer.tape."""
