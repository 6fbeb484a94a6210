//! Names of the files of a dump.

use super::checksum::DIGITS;

/// The file that makes a directory a dump.
pub const MANIFEST: &str = "manifest.json";

/// `sok-<16 hexadecimal digits of the dump>-<number>.safetensors`.
pub(super) fn data_file_name(unique: u64, number: usize) -> String {
    format!("sok-{unique:016x}-{number:05}.safetensors")
}

/// The manifest's name until it is whole.
pub(super) fn manifest_aside_name(unique: u64) -> String {
    format!("sok-{unique:016x}-manifest.json")
}

/// Whether a dump made up this name: only such files are ever removed.
pub(super) fn is_own_name(name: &str) -> bool {
    let parts = || {
        let (digits, rest) = name.strip_prefix("sok-")?.split_at_checked(DIGITS)?;
        Some((digits, rest.strip_prefix('-')?))
    };
    parts().is_some_and(|(digits, rest)| {
        let number = rest.strip_suffix(".safetensors").unwrap_or_default();
        let is_number = (5..=20).contains(&number.len()) && number.bytes().all(|b| b.is_ascii_digit());
        digits.bytes().all(|b| b.is_ascii_hexdigit()) && (rest == MANIFEST || is_number)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_that_a_dump_makes_are_own() {
        assert!(is_own_name(&data_file_name(7, 0)));
        assert!(is_own_name(&data_file_name(u64::MAX, 123_456)));
        assert!(is_own_name(&manifest_aside_name(0)));
        for other in [
            "",
            MANIFEST,
            "sok-",
            "model.safetensors",
            "sok-0000000000000000-.safetensors",
            "sok-0000000000000000-00000.safetensors.bak",
            "sok-0000000000000000-../00000.safetensors",
            "../sok-0000000000000000-00000.safetensors",
            "sok-00000000000000é-00000.safetensors",
        ] {
            assert!(!is_own_name(other), "{other}");
        }
    }
}
