"""Artefacts on disk: written whole, sealed and signed, verified before use.

Read in this order: artefact, retention.

    artefact    Artefact, write_artefact, read_artefact, find_artefact, check_runtime, fingerprint
                Store: artefacts under their ids, with `current` and `previous`
    retention   StoreCleaner, retain: which artefacts stay; record_refusal
    signing     find_key, sign, is_signed: keys, signatures and sealed manifests
    kept_file   read_kept, write_kept: signed files of caches
    files       replace_files, staging, remove, sweep: writing so that nobody meets half a file
"""
