"""A question as a value: a query string, a link, flags or a form become a Request, and a Request becomes a link.

    text ──keys──► fields ──conflicts──► Request ──format_query──► text

Every key of the contract is one row of `keys.KEYS`. `values` reads single values. `needs` defines the questions that a key
applies to, `conflicts` the values that exclude each other. `text` reads and writes one question or several. No torch.
"""
