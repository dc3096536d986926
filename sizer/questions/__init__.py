"""Two to four questions beside each other: how they are read, in what they differ, and what each of them is answered.

texts ──read_questions──► Requests ──┬─key_differences──► the keys that differ, and those that are the same
                                     └─ Reports ─side_of─► SideBySide ─► page, CSV, JSON
"""
