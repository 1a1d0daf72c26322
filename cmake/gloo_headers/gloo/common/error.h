#pragma once
// See ../context.h.
