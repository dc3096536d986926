"""Real devices: what is there, what a piece of work really takes on one, and how the estimate compares.

    record ◄── machine ◄── readers ◄── trial ◄── suite
       ▲
       └────── comparison ◄── ledger

A room imports from those that its arrows lead to, never the other way round:

record      what a device showed, as plain values and as files
machine     what is here: the computer, its devices, what their allocators do
readers     a device's own counters and events, one reader for each kind
trial       one measurement: the process that does it, the module, its steps, their time
suite       many measurements, one after the other
comparison  the estimate held against a measurement
ledger      comparisons kept, counted, and handed from machine to machine
"""
