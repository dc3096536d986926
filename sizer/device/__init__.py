"""Real devices: the devices of this machine, measurements on them, and comparisons with the estimate.

    record ◄── machine ◄── readers ◄── trial ◄── suite
       ▲
       └────── comparison ◄── ledger

A room imports only from rooms that its arrows point to:

    record      a device's figures, as plain values and as files
    machine     the computer, its devices, and how their allocators behave
    readers     a device's own counters and events, one reader for each kind
    trial       one measurement: its process, the module, its steps, their time
    suite       many measurements, one after the other
    comparison  the estimate compared with a measurement
    ledger      comparisons stored, counted, and exchanged between machines
"""
