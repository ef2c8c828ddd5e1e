"""The errors that quantmark raises on purpose, as one small tree.

QuantmarkError
|-- ConfigError             a config that can't be: says what is allowed
|   `-- UnsupportedOptionError    an option that this backend lacks
|-- RangeError              a range that can't be used
|   |-- UncalibratedError       an observer saw no data
|   |-- NonFiniteError          an observer saw NaN or infinity
|   `-- MissingRangeError       a range table lacks a node, or names an unknown one
|-- AnnotationError         the graph can't be annotated as the config asks
|   `-- SharingConflictError    two contracts meet in one qparam group
|-- InputError              a file, a batch or a name given by the user can't be used
`-- UnsafeModelError        a checked graph breaks a contract
"""


class QuantmarkError(Exception):
    """Base of every error that quantmark raises on purpose."""


class ConfigError(QuantmarkError, ValueError):
    """A config holds a combination that its backend can't run."""


class UnsupportedOptionError(ConfigError):
    """A config factory was given an option, or a value of one, that its backend lacks."""


class RangeError(QuantmarkError, ValueError):
    """A range can't be turned into qparams."""


class UncalibratedError(RangeError):
    """An observer was asked for qparams before it saw any data."""


class NonFiniteError(RangeError):
    """An observer saw NaN or infinity."""


class MissingRangeError(RangeError, KeyError):
    """A range table lacks a node that needs a range, or names a node that the graph lacks."""

    __str__ = Exception.__str__  # KeyError would print the message's repr


class AnnotationError(QuantmarkError):
    """The graph can't be annotated as the config asks."""


class SharingConflictError(AnnotationError):
    """Two tensors that must share qparams have contracts that no qparams satisfy."""


class InputError(QuantmarkError, ValueError):
    """A file, a batch or a name given by the user can't be used."""


class UnsafeModelError(QuantmarkError):
    """A checked graph breaks a contract; the message lists the findings."""
