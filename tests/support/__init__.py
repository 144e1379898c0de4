"""Harnesses that several tests share.

- `checked_reports`: checked reports, honest ones and every class of lie
- `protocol_samples`: helpers with fixed keys, reports honest and forged, queries, columns
- `both_stores`: one test on a store in memory and on a database
- `device_auditor`: what a device may do and must charge, worked out a second time
- `device_timelines`: everything that can happen to a device, from a seed
- `virtual_ticks`: ticks that no machine is too busy for
- `small_worlds`: devices with a handful of impressions, and what can be learnt exactly
- `display_worlds`: the same with a handful of conversions, and publishers that ask
- `commit_world`: three ledgers over a network that loses, delays and repeats
- `commit_runs`: worlds to play
- `three_agreements`: three helpers that agree and spend in virtual time
- `made_evidence`: check shares made up, and a helper that lies about its own
- `joint_trio`: three parties that draw joint noise, honest or not, with its clear twin
- `three_helpers`: three helpers in one process over real HTTPS
- `command_tree`: every command there is
- `mistakes`: what people get wrong on the command line, and a folder to do it in
- `planted_bugs`: bugs to plant in a copy of the project, each with the test that must fall
- `processes`: processes that are dead when their test has ended
- `renewal`: a renewed helper set, signed by all three
- `bad_helper`: one bad helper among three
- `chaos_helper`: a helper process with failpoints
- `chaos_trio`: three of them, and an audit of all that left
- `browser`: real Chromium, and demonstrations for it to visit
- `many_posts`: clients that post reports to a collector
- `hostile_posts`: strangers who want its memory, disk or attention
- `exposition`: Prometheus' text format, read strictly
- `figures`: what a long run leaves behind, as JSON
"""
