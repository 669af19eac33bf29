"""What can go wrong while a pipeline runs, beyond what the user's own code raises."""


class PipelineError(RuntimeError):
    """The pipeline can't do what was asked, or can't go on."""


class PeerError(PipelineError):
    """Another rank failed, or went silent; the message says which one, where, and why."""


class DisagreementError(PipelineError):
    """The ranks were not asked to do the same thing; the message says how they differ."""


def with_note(error: BaseException, note: str) -> None:
    """Says where an error of the user's code happened without changing its type or its traceback."""
    add_note = getattr(error, "add_note", None)  # Python 3.11
    if add_note is not None:
        add_note(note)
    elif error.args and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]}\n{note}", *error.args[1:])
    else:
        error.args = (*error.args, note)
