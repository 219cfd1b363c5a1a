"""What a text says of memory that ran out: an exception, a log, an exit code.

a file, standard input ──► log.py      finds messages, a piece at a time, in bounded memory
                           message.py  the forms: which words are a message, what each figure is
                           codes.py    exit codes and signals
                           verdict.py  size or fragmentation, and the changes that can bring it
                           words.py    the text and the JSON that `memtools explain` prints
"""
