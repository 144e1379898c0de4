"""Bugs to plant in the check of reports' numbers, in parts of reports' ε and in a device's services, each with the test
that must fall.

The first twenty-eight are those of the scheme's design; most of those of parts are of the design of parts.
"""

from __future__ import annotations

from typing import NamedTuple

_VALIDITY = "protocol/validity.py"
_SELF_CHECK = "protocol/validity.py"
_COINS = "protocol/shape.py"
_RESIDUES = "mpc_helpers/admission/residues.py"
_BLOCKS = "mpc_helpers/admission/column.py"
_INGEST = "mpc_helpers/admission/ingest.py"
_CHECKER = "mpc_helpers/agreement/preparation.py"
_NEGOTIATOR = "mpc_helpers/agreement/preparation.py"
_NEGOTIATION = "mpc_helpers/agreement/negotiation.py"
_SERVICES = "device/services.py"
_UNITS = "protocol/units.py"
_SCHEMA = "mpc_helpers/ledger/schema.py"
_REPORTS = "mpc_helpers/ledger/reports.py"
_SPENDING = "protocol/querier/spending.py"

_WORDS = "if LEAST_POINT <= word < P]"
_UNFIT = "(points < np.uint64(LEAST_POINT)) | (points >= _P)"
_HASH_OF_ONE = "bytes([counter]) + prefix)"
_HASH_OF_MANY = "sha256(_FIRST_HASH + header[:end])"
_LAST_LINE = "        return residues\n\n    def _evaluate_planes"
_SUM = "        residues[:, 0] = subtract(_sum(multiply(over, inverse(under)), 0), _sum(parts, 1))\n"
_LOCK = "if self.batch.evidence is not None and (accepted & ~self.batch.evidence.check_results.confirmed).any():"
_NEED = "max(-(-query_epsilon * report_sensitivity // query_sensitivity), least_need(report_epsilon))"
_NEAREST = "(2 * query_epsilon * report_sensitivity + query_sensitivity) // (2 * query_sensitivity)"
_OF_ABORTED = "CASE WHEN state <> 'released' THEN coalesce(reports.before, :paid)"
_CLAMP = " WHEN attempts.attempt = {ELSEWHERE} AND reports.after > :paid THEN :paid ELSE reports.after END"
_DECIDED = "CASE WHEN state IN ('aborted', 'released') THEN {MOST} END"
_AFTER = "after = CASE WHEN :whole = 1 THEN 0 ELSE {LEFT} - :need END"
_MERGED = "left, draws = np.minimum.reduceat(left, first), np.maximum.reduceat(draws, first)"
_LEDGER = "mpc_helpers/test_ledger_parts.py"
_ADDS_UP = f"{_LEDGER}::test_parts_add_up_to_what_was_paid_and_not_a_micro_more"
_ONLY_RELEASED = f"{_LEDGER}::test_only_a_released_part_is_taken_and_a_lock_outlasts_everything_else"
_USED_UP = f"{_LEDGER}::test_a_query_that_does_not_keep_the_rest_leaves_nothing"
_REBUILT = f"{_LEDGER}::test_a_rebuilt_ledger_leaves_the_less_of_both_peers_and_counts_what_is_undecided"
_DRAWS = f"{_LEDGER}::test_draws_are_counted_over_all_answers_and_a_release_neither_counts_nor_resets"
_AUDIT = "protocol/test_spending.py::test_the_audit_finds_answers_that_cost_more_than_was_paid"


class Edit(NamedTuple):
    """`old` stands exactly once in `file`; `new` takes its place."""

    file: str
    old: str
    new: str


class PlantedBug(NamedTuple):
    """A bug and the test that falls, as pytest names it."""

    name: str
    test: str
    edits: tuple[Edit, ...]


BUGS = (
    PlantedBug(
        "a label is taken as a point (one report)",
        "protocol/test_validity.py::test_points_are_the_first_words_that_are_elements_and_no_labels",
        (Edit(_VALIDITY, _WORDS, "if word < P]"),),
    ),
    PlantedBug(
        "a label is taken as a point (many reports)",
        "mpc_helpers/test_residues.py::test_points_of_many_skip_what_is_no_point",
        (Edit(_RESIDUES, _UNFIT, "points >= _P"),),
    ),
    PlantedBug(
        "p is taken as a point (one report)",
        "protocol/test_validity.py::test_points_are_the_first_words_that_are_elements_and_no_labels",
        (Edit(_VALIDITY, _WORDS, "if LEAST_POINT <= word]"),),
    ),
    PlantedBug(
        "p is taken as a point (many reports)",
        "mpc_helpers/test_residues.py::test_points_of_many_skip_what_is_no_point",
        (Edit(_RESIDUES, _UNFIT, "points < np.uint64(LEAST_POINT)"),),
    ),
    PlantedBug(
        "points do not cover the body hash",
        "protocol/test_report.py::test_every_field_before_the_openings_moves_the_points",
        (
            Edit(_VALIDITY, _HASH_OF_ONE, "bytes([counter]) + prefix[:207] + prefix[239:])"),
            Edit(_RESIDUES, _HASH_OF_MANY, "sha256(_FIRST_HASH + header[:207] + header[239:end])"),
        ),
    ),
    PlantedBug(
        "points do not cover cap and spread",
        "protocol/test_report.py::test_every_field_before_the_openings_moves_the_points",
        (
            Edit(_VALIDITY, _HASH_OF_ONE, "bytes([counter]) + prefix[:-10])"),
            Edit(_RESIDUES, _HASH_OF_MANY, "sha256(_FIRST_HASH + header[: end - 10])"),
        ),
    ),
    PlantedBug(
        "openings are not compared with values",
        "mpc_helpers/test_residues.py::test_openings_chosen_after_the_points_leave_residues",
        (Edit(_RESIDUES, _LAST_LINE, "        residues[:, -len(shape.planes) :] = 0\n" + _LAST_LINE),),
    ),
    PlantedBug(
        "the sum is not compared",
        "mpc_helpers/test_residues.py::test_bad_numbers_leave_residues_and_those_around_them_do_not",
        (Edit(_RESIDUES, _LAST_LINE, "        residues[:, 0] = 0\n" + _LAST_LINE),),
    ),
    PlantedBug(
        "only the first point counts",
        "mpc_helpers/test_residues.py::test_known_points_would_break_it",
        (Edit(_RESIDUES, _LAST_LINE, "        residues[1:] = 0\n" + _LAST_LINE),),
    ),
    PlantedBug(
        "the side query is in the same sum",
        "mpc_helpers/test_residues.py::test_bad_numbers_leave_residues_and_those_around_them_do_not",
        (
            Edit(
                _RESIDUES,
                _SUM,
                _SUM + "        if shape.kappa:\n"
                "            residues[:, 0] = add(residues[:, 0], residues[:, 1])\n"
                "            residues[:, 1] = 0\n",
            ),
        ),
    ),
    PlantedBug(
        "always two points",
        "protocol/test_shape.py::test_forging_never_costs_less_than_two_to_the_hundred",
        (Edit("protocol/shape.py", "(2 if terms <= _TWO_POINTS else 3) if self.cap", "2 if self.cap"),),
    ),
    PlantedBug(
        "one mask for all points",
        "protocol/test_validity.py::test_every_point_and_plane_has_a_mask_of_its_own",
        (
            Edit(
                _VALIDITY,
                "zip(masks, planes * shape.points, strict=True)",
                "zip(masks[: len(planes)] * shape.points, planes * shape.points, strict=True)",
            ),
            Edit(
                _VALIDITY,
                "        powers = powers_of(point, terms)\n",
                "        powers, mask = powers_of(point, terms), iter(dealt.masks)\n",
            ),
            Edit(
                _SELF_CHECK,
                "        paid = part = 0\n",
                "        paid = part = 0\n        mask_at = shape.explicit - shape.buckets\n",
            ),
            Edit(
                _RESIDUES,
                "            places[point, plane, 0] = mask_at\n",
                "            places[point, plane, 0] = shape.explicit - shape.buckets + plane\n",
            ),
        ),
    ),
    PlantedBug(
        "one coin too many",
        "protocol/test_shape.py::test_coins_are_worth_the_cap_and_pay_whatever_is_within_it",
        (Edit(_COINS, "    many.append(largest)\n", "    many.append(largest + 1)\n"),),
    ),
    PlantedBug(
        "openings above p are taken",
        "mpc_helpers/test_residues.py::test_an_opening_above_p_is_malformed_though_it_stands_for_the_right_number",
        (
            Edit(
                "mpc_helpers/admission/headers.py",
                "return matching & (read_openings(rules.query.shape, headers) < _P).all(axis=1)",
                "return matching",
            ),
        ),
    ),
    PlantedBug(
        "any one peer's root is enough",
        "mpc_helpers/test_checker.py::test_reflected_shares_save_nothing",
        (Edit(_CHECKER, "if len(roots) == 1:", "if len(roots) < 3:"),),
    ),
    PlantedBug(
        "any one peer's block hash is enough",
        "mpc_helpers/test_checker.py::test_reflected_shares_save_nothing",
        (Edit(_CHECKER, "if all(hashes[number] == own", "if any(hashes[number] == own"),),
    ),
    PlantedBug(
        "a list is not compared with its root",
        "mpc_helpers/test_checker.py::test_a_lie_in_any_message_changes_no_verdict",
        (Edit(_CHECKER, " or check_root(hashes) != root", ""),),
    ),
    PlantedBug(
        "a block is not compared with its list",
        "mpc_helpers/test_checker.py::test_a_lie_in_any_message_changes_no_verdict",
        (Edit(_CHECKER, "if expected is not None and block_hash(number, preimage) != expected:", "if False:"),),
    ),
    PlantedBug(
        "elements above p in a block are taken",
        "mpc_helpers/test_residues.py::test_a_block_has_one_encoding",
        (Edit(_BLOCKS, "if (shares >= np.uint64(P)).any():", "if False:"),),
    ),
    PlantedBug(
        "the bitmap is not in a block's hash",
        "mpc_helpers/test_residues.py::test_a_block_names_its_place_and_the_reports_it_holds",
        (
            Edit(
                _BLOCKS, 'number.to_bytes(4, "big") + preimage)', 'number.to_bytes(4, "big") + preimage[BITMAP_SIZE:])'
            ),
        ),
    ),
    PlantedBug(
        "shares that do not fit condemn the report",
        "mpc_helpers/test_checker.py::test_a_consistent_lie_condemns_nobody_and_saves_nobody",
        (Edit(_CHECKER, "if not fit(first, second, third).all():", "if False:"),),
    ),
    PlantedBug(
        "one residue of zero is enough",
        "mpc_helpers/test_checker.py::test_a_report_is_bad_if_a_single_residue_is_not_zero",
        (Edit(_CHECKER, "(second == third).all(axis=1)", "(second == third).any(axis=1)"),),
    ),
    PlantedBug(
        "a report that is not shown passes",
        "mpc_helpers/test_checker.py::test_a_report_that_is_proposed_must_be_shown",
        (Edit(_CHECKER, "if not block.opened[places[accepted[rows][places]]].all():", "if False:"),),
    ),
    PlantedBug(
        "what is reserved is not what was checked",
        "mpc_helpers/test_checker.py::test_a_proposal_that_changes_after_the_check_began_is_not_reserved",
        (
            Edit(_NEGOTIATION, "if not self.frozen and (previous", "if (previous"),
            Edit(_NEGOTIATION, _LOCK, "if False:"),
        ),
    ),
    PlantedBug(
        "an invalid report is proposed again",
        "mpc_helpers/test_checker.py::test_bad_reports_are_left_out_and_counted_by_all_three",
        (Edit(_NEGOTIATOR, "invalid = admitted & batch.invalid & ~seen", "invalid = admitted & False"),),
    ),
    PlantedBug(
        "seeds are not new",
        "protocol/test_report.py::test_seeds_are_new_for_every_seal_even_from_a_copied_random_state",
        (Edit("protocol/report.py", "shake_256(entropy(SEED_SIZE) + purpose)", "shake_256(entropy(SEED_SIZE))"),),
    ),
    PlantedBug(
        "the device does not check itself",
        "protocol/test_validity.py::test_an_honest_proof_holds_and_every_number_in_it_matters",
        (Edit(_SELF_CHECK, "    secret = reconstruct(dealt)\n", "    return True\n    secret = reconstruct(dealt)\n"),),
    ),
    PlantedBug(
        "the device does not look at the numbers",
        "protocol/test_validity.py::test_an_honest_proof_holds_and_every_number_in_it_matters",
        (Edit(_SELF_CHECK, "    if not _encodes(secret[: shape.buckets], dealt.amounts):\n", "    if False:\n"),),
    ),
    PlantedBug(
        "the device does not look outside the groups it wrote",
        "protocol/test_validity.py::test_numbers_outside_the_groups_do_not_hold",
        (Edit(_SELF_CHECK, "np.count_nonzero(numbers) == within and not difference % P", "not difference % P"),),
    ),
    PlantedBug(
        "a null report takes fewer steps",
        "protocol/test_validity.py::test_every_content_takes_the_same_steps",
        (Edit(_VALIDITY, "    if len(amounts) > 1:\n", "    if len(amounts) > 1 or not amounts[0][0]:\n"),),
    ),
    PlantedBug(
        "paying stops at the first amount that takes a coin",
        "protocol/test_shape.py::test_coins_are_worth_the_cap_and_pay_whatever_is_within_it",
        (
            Edit(
                _COINS,
                "            plane += [label] * taken\n",
                "            plane += [label] * taken\n            if taken:\n                break\n",
            ),
        ),
    ),
    # Parts of a report's ε.
    PlantedBug(
        "parts: rounded down",
        "protocol/test_epsilon.py::test_need_rounds_up_and_has_a_least_part",
        (
            Edit(
                _UNITS,
                _NEED,
                "max(query_epsilon * report_sensitivity // query_sensitivity, least_need(report_epsilon))",
            ),
        ),
    ),
    PlantedBug(
        "parts: rounded to the nearest",
        "protocol/test_epsilon.py::test_need_rounds_up_and_has_a_least_part",
        (Edit(_UNITS, _NEED, f"max({_NEAREST}, least_need(report_epsilon))"),),
    ),
    PlantedBug(
        "parts: no least part",
        "protocol/test_epsilon.py::test_need_rounds_up_and_has_a_least_part",
        (Edit(_UNITS, _NEED, "-(-query_epsilon * report_sensitivity // query_sensitivity)"),),
    ),
    PlantedBug(
        "parts: what was released is not folded in",
        _ADDS_UP,
        (Edit(_SCHEMA, "THEN :paid ELSE reports.after END", "THEN :paid ELSE coalesce(reports.before, :paid) END"),),
    ),
    PlantedBug(
        "parts: what was released is folded in twice",
        _ADDS_UP,
        (Edit(_REPORTS, "ELSE {LEFT} - :need END", "ELSE {LEFT} - 2 * :need END"),),
    ),
    PlantedBug(
        "parts: compared with what was paid",
        _ADDS_UP,
        (Edit(_REPORTS, "WHERE {LEFT} >= :need", "WHERE :paid >= :need"),),
    ),
    PlantedBug(
        "parts: what was aborted is taken",
        _ONLY_RELEASED,
        (Edit(_SCHEMA, _OF_ABORTED, "CASE WHEN state <> 'released' THEN reports.after"),),
    ),
    PlantedBug(
        "parts: an abort gives back all that was paid",
        _ONLY_RELEASED,
        (Edit(_SCHEMA, _OF_ABORTED, "CASE WHEN state <> 'released' THEN :paid"),),
    ),
    PlantedBug(
        "parts: what was renounced is free",
        _ONLY_RELEASED,
        (Edit(_SCHEMA, _DECIDED, _DECIDED.replace("(", "('renounced', ")),),
    ),
    PlantedBug(
        "parts: no lock",
        _ONLY_RELEASED,
        (Edit(_SCHEMA, _DECIDED, "{MOST}"),),
    ),
    PlantedBug(
        "parts: a whole query keeps the rest",
        _USED_UP,
        (Edit(_REPORTS, _AFTER, "after = {LEFT} - :need"),),
    ),
    PlantedBug(
        "parts: a whole query of fresh reports keeps the rest",
        _USED_UP,
        (Edit(_REPORTS, "after=0 if whole else paid - need,", "after=paid - need,"),),
    ),
    PlantedBug(
        "parts: the database does not look at what a whole query leaves",
        f"{_LEDGER}::test_the_database_itself_refuses",
        (Edit(_SCHEMA, "NEW.after <> 0 AND (SELECT whole", "NEW.after < 0 AND (SELECT whole"),),
    ),
    PlantedBug(
        "parts: the database does not look at what the last attempt left",
        f"{_LEDGER}::test_the_database_itself_refuses",
        (Edit(_SCHEMA, "ELSE NEW.before <> OLD.after END", "ELSE NEW.before < OLD.after END"),),
    ),
    PlantedBug(
        "parts: peers are believed above what was paid",
        f"{_LEDGER}::test_two_ledgers_lost_in_turn_and_a_peer_that_claims_more_than_was_paid",
        (Edit(_SCHEMA, _CLAMP, " ELSE reports.after END"),),
    ),
    PlantedBug(
        "parts: rebuilt with the more of both peers",
        _REBUILT,
        (Edit(_REPORTS, _MERGED, _MERGED.replace("np.minimum", "np.maximum")),),
    ),
    PlantedBug(
        "parts: rebuilt with the fewer draws",
        _REBUILT,
        (Edit(_REPORTS, _MERGED, _MERGED.replace("np.maximum", "np.minimum")),),
    ),
    PlantedBug(
        "parts: exports forget what is undecided",
        _REBUILT,
        (
            Edit(
                _REPORTS,
                "CASE WHEN state = 'aborted' THEN coalesce(reports.before, :everything)",
                "CASE WHEN state <> 'released' THEN coalesce(reports.before, :everything)",
            ),
        ),
    ),
    PlantedBug(
        "parts: a release resets draws",
        _DRAWS,
        (Edit(_REPORTS, "draws = reports.draws + (SELECT", "draws = 0 + (SELECT"),),
    ),
    PlantedBug(
        "parts: a release counts as a draw",
        _DRAWS,
        (
            Edit(
                _SCHEMA, "FAILED_DRAW = \"CASE WHEN state = 'aborted' THEN drawn ELSE 0 END\"", 'FAILED_DRAW = "drawn"'
            ),
        ),
    ),
    PlantedBug(
        "parts: taken from others in vain",
        f"{_LEDGER}::test_nothing_is_taken_from_others_by_a_reservation_that_finds_too_little",
        (Edit(_REPORTS, "if held.attempt != attempt and held.most < group.amount.need:", "if False:"),),
    ),
    PlantedBug(
        "parts: older entries are accepted",
        "mpc_helpers/test_parts.py::test_a_ledger_rebuilt_from_the_older_of_two_exports_is_refused",
        (Edit("mpc_helpers/agreement/peers.py", "if sequence < self._rebuilt_from.get(sender, 0):", "if False:"),),
    ),
    PlantedBug(
        "parts: nobody looks for votes since the export",
        "processes/test_parts_of_reports.py::test_answers_cost_together_at_most_what_was_paid",
        (Edit("mpc_helpers/ledger/rebuild.py", "if ledger.attempts.voted_since(party, exported):", "if False:"),),
    ),
    PlantedBug(
        "parts: all spent is not spent",
        "mpc_helpers/test_parts.py::test_an_operator_in_doubt_leaves_nothing_of_what_peers_list",
        (Edit("mpc_helpers/ledger/rebuild.py", "if all_spent:", "if False:"),),
    ),
    PlantedBug(
        "parts: every query keeps the rest",
        "mpc_helpers/test_parts.py::test_three_helpers_use_reports_up_unless_all_three_are_set_otherwise",
        (Edit(_NEGOTIATION, "whole=not self.terms.keeps_rest,", "whole=self.batch.amounts is None,"),),
    ),
    PlantedBug(
        "parts: the audit lets a micro through",
        _AUDIT,
        (
            Edit(
                _SPENDING,
                "return spent > Fraction(self.paid, self.sensitivity)",
                "return spent * self.sensitivity > self.paid + 1",
            ),
        ),
    ),
    PlantedBug(
        "parts: the audit lets two answers use up",
        _AUDIT,
        (Edit(_SPENDING, "len(wholes) > 1", "len(wholes) > 2"),),
    ),
    PlantedBug(
        "parts: the audit does not look at the order",
        _AUDIT,
        (Edit(_SPENDING, " or too_late", ""),),
    ),
    # Ours.
    PlantedBug(
        "the second lock is open",
        "mpc_helpers/test_checker.py::test_what_was_not_confirmed_is_not_reserved",
        (Edit(_NEGOTIATION, _LOCK, "if False:"),),
    ),
    PlantedBug(
        "a report that is left out stays in the sums",
        "mpc_helpers/test_residues.py::test_a_report_found_invalid_after_ingest_leaves_the_sums",
        (
            Edit(
                _INGEST,
                "leave_out = np.flatnonzero(self.summed & ~accepted)",
                "leave_out = np.flatnonzero(self.admitted & ~accepted)",
            ),
        ),
    ),
    PlantedBug(
        "a block is shown though it came out otherwise",
        "mpc_helpers/test_residues.py::test_a_block_that_comes_out_otherwise_the_second_time_is_not_shown",
        (Edit(_INGEST, "if block_hash(number, preimage) != self.blocks[number]:", "if False:"),),
    ),
    PlantedBug(
        "a set is renewed by other helpers",
        "device/test_services.py::test_no_other_set_takes_its_place",
        (Edit(_SERVICES, "if [one.identity_key for one in helper_set.helpers] != [", "if [] and [] != ["),),
    ),
    PlantedBug(
        "a set is renewed by an older one",
        "device/test_services.py::test_no_other_set_takes_its_place",
        (Edit(_SERVICES, "if helper_set.number <= older.number:", "if helper_set.number < 0:"),),
    ),
    PlantedBug(
        "an unsigned set is trusted",
        "device/test_services.py::test_a_set_must_be_signed_usable_and_new",
        (
            Edit(
                _SERVICES,
                "    helper_set.verify()\n    helper_set.sealing_keys(now)\n",
                "    helper_set.sealing_keys(now)\n",
            ),
        ),
    ),
    PlantedBug(
        "every service has a budget of its own",
        "device/test_services.py::test_two_services_have_one_budget",
        (
            Edit(
                "device/conversion.py",
                '        kappa = whole("kappa", self.kappa, 0, MAX_SENSITIVITY)\n',
                '        kappa, site = whole("kappa", self.kappa, 0, MAX_SENSITIVITY), f"{len(service)}.{site}"\n',
            ),
        ),
    ),
    PlantedBug(
        "the first service is taken, whatever the site chose",
        "device/test_services.py::test_the_report_names_the_set_that_the_site_chose",
        (
            Edit(
                "device/report.py",
                "seal = self.by_name.get(request.service)",
                "seal = next(iter(self.by_name.values()))",
            ),
        ),
    ),
    PlantedBug(
        "an unknown service is noticed after the charge",
        "device/test_services.py::test_an_unknown_service_is_an_error_of_the_options",
        (
            Edit("device/limits.py", "        if name not in self.aggregation_services:\n", "        if not name:\n"),
            Edit(
                "device/report.py",
                "        if seal is None:\n",
                "        if seal is None:\n            return lambda _: self.by_name['']\n        if not seal:\n",
            ),
        ),
    ),
)
