"""Bugs to plant in the check of reports' numbers and in a device's services, each with the test that must fall.

The first twenty-eight are those of the scheme's design.
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

_WORDS = "if LEAST_POINT <= word < P]"
_UNFIT = "(points < np.uint64(LEAST_POINT)) | (points >= _P)"
_HASH_OF_ONE = "bytes([counter]) + prefix)"
_HASH_OF_MANY = "sha256(_FIRST_HASH + header[:end])"
_LAST_LINE = "        return residues\n\n    def _evaluate_planes"
_SUM = "        residues[:, 0] = subtract(_sum(multiply(over, inverse(under)), 0), _sum(parts, 1))\n"
_LOCK = "if self.batch.evidence is not None and (accepted & ~self.batch.evidence.check_results.confirmed).any():"


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
        (Edit(_CHECKER, "if not block.opened[places].all():", "if False:"),),
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
