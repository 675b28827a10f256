//! Values of layouts that C shares out of bytes, and as bytes.

#![expect(unsafe_code, reason = "layouts that C shares, as bytes")]

/// A struct of integers without padding, for which any bytes are a value.
///
/// # Safety
///
/// The type is `repr(C)`, consists of integers and arrays of them, and has no padding.
/// For layouts that are made of a C header, a script has the C compiler refuse padding in it.
pub unsafe trait Plain: Copy {}

/// The value that `bytes` are; `None` if there are more or fewer than it has.
#[must_use]
pub fn read<T: Plain>(bytes: &[u8]) -> Option<T> {
    if bytes.len() != size_of::<T>() {
        return None;
    }
    // SAFETY: there are as many bytes as a T has, and any bytes are one.
    Some(unsafe { bytes.as_ptr().cast::<T>().read_unaligned() })
}

/// The bytes of a value.
#[must_use]
pub fn bytes<T: Plain>(value: &T) -> &[u8] {
    // SAFETY: a T has no padding, so that all of its bytes are initialised.
    unsafe { core::slice::from_raw_parts(core::ptr::from_ref(value).cast::<u8>(), size_of::<T>()) }
}
