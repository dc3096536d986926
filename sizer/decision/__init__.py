"""Decisions from an estimate: levers, limits, other devices. Every figure is traced or replayed for its own question.

cells ◄── levers | limits | devices        cells makes the estimate of any one dtype and batch size; the answers are plain data
                                           (sizer.report.decision)
"""
