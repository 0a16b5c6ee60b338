"""The state machine of all operations: the calls that a program may make, in any order."""

from __future__ import annotations

from hypothesis.errors import HypothesisException
from hypothesis.stateful import invariant

from model.exporter_rules import ExporterRules
from model.other_rules import OtherRules
from model.region_rules import RegionRules


class Machine(ExporterRules, RegionRules, OtherRules):
    """One sequence. After each operation, the model is the state that the library must have."""

    @invariant()
    def the_library_is_as_the_model_says(self):
        self.compare()

    def teardown(self) -> None:
        """Tear down, and record a violation that is found only now: it may not be reproduced."""
        try:
            super().teardown()
        except HypothesisException:
            raise
        except Exception as error:
            self.process.journal.keep(error)
            raise
