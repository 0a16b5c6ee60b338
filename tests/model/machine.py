"""A state machine whose operations are a program's calls in any order."""

from __future__ import annotations

from hypothesis.errors import HypothesisException
from hypothesis.stateful import invariant

from model.exporter_rules import ExporterRules
from model.other_rules import OtherRules
from model.region_rules import RegionRules


class Machine(ExporterRules, RegionRules, OtherRules):
    """One sequence of operations.

    After each operation, the library's state must equal the model's state.
    """

    @invariant()
    def the_library_is_as_the_model_says(self):
        self.compare()

    def teardown(self) -> None:
        """Tear down; record a violation that the teardown finds, because it might not be
        reproducible.
        """
        try:
            super().teardown()
        except HypothesisException:
            raise
        except Exception as error:
            self.process.journal.keep(error)
            raise
