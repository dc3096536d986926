"""Other people's files: a training config, a Trainer's arguments, an out-of-memory message, a memory snapshot. No torch.

    text ──recognise──► YAML, JSON, command, code ──formats──► Question: keys of a query, assumptions, uncounted lines
                    └─► message ──out_of_memory──► Diagnosis
    bytes ──pickle_reader──► plain values ──snapshot──► SnapshotReport: allocated and reserved memory over the events

Each format is a row of `formats.FORMATS`. A snapshot is a pickle: `pickle_reader` builds plain values from `pickletools.genops`
and refuses every opcode that could import or call something.
"""
