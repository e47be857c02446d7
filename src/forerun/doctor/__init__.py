"""What is wrong with this machine, and how to mend it: one function per check.

Each check looks at one thing, says what it saw, and gives the command that puts it right.
"""
