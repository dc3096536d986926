"""One measurement: the process that does it and is killed afterwards, the module, its steps, their time."""
