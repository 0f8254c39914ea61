"""Prompts from a function of a user's package."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from async_opd.config.sections.section import Name
from async_opd.config.user_code import SOURCE_GROUP, UserCodeError, fits, user_object
from async_opd.core.errors import SourceError
from async_opd.core.row import Row
from async_opd.data.fields import RowSource, row_error

if TYPE_CHECKING:
    from async_opd.config.sections.data import DataConfig


class UserSource(RowSource):
    """Rows that a function of an installed package yields. See docs/extending.md."""

    kind: Literal["user"]
    function: Name = Field(min_length=1)
    """``module:function``, or an entry point of the group ``async_opd.sources``. It returns an
    iterable of mappings, the rows' fields, which are the same in every call."""
    options: dict[str, Any] = Field(default={})
    """Keyword arguments of the function."""

    @property
    def label(self) -> str:
        """The function's name."""
        return self.function

    def rows(self, index: int, data: DataConfig, start: int = 0) -> Iterator[Row | SourceError]:
        """See PromptSource.rows. Rows before ``start`` are made and dropped."""
        number = start - 1
        try:
            function = user_object(self.function, SOURCE_GROUP)
            fits(function, self.function, **self.options)
            for number, entry in enumerate(islice(function(**self.options), start, None), start):
                try:
                    if not isinstance(entry, Mapping):
                        raise ValueError(f"is {type(entry).__name__}, not a mapping")
                    yield self.row(dict(entry), f"{index}:{number}", data)
                except ValueError as error:
                    yield row_error(self.label, error, number + 1)
        except UserCodeError as error:
            raise SourceError(self.label, str(error)) from error
        except (Exception, SystemExit) as error:  # of the user's code: it can raise anything
            cause = f"failed after {number + 1} rows: {type(error).__name__}: {error}"
            raise SourceError(self.label, cause) from error
