"""The state machine of all operations, which are the calls of a program in any order."""

from __future__ import annotations

from hypothesis.errors import HypothesisException
from hypothesis.stateful import invariant

from model.exporter_rules import ExporterRules
from model.other_rules import OtherRules
from model.region_rules import RegionRules


class Machine(ExporterRules, RegionRules, OtherRules):
    """One sequence of operations.

    After each operation, the library's state must equal the model's.
    """

    @invariant()
    def the_library_is_as_the_model_says(self):
        self.compare()

    def teardown(self) -> None:
        """Tear down; record a violation that is found only now, because it might not be
        reproducible.
        """
        try:
            super().teardown()
        except HypothesisException:
            raise
        except Exception as error:
            self.process.journal.keep(error)
            raise
