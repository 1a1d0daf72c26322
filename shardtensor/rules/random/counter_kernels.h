#pragma once

#include "shardtensor/tensor/cuda_kernel.h"

// What counter_tensors.cpp would take hundreds of operators for.

namespace shardtensor::detail {

/// `number` and what one dim of a piece adds to it: places count the piece's
/// elements, `inner` of them for each row of the dim.
SHARDTENSOR_CUDA_KERNEL(
    kCounterNumber,
    counter_number,
    template <typename T>
    T counter_number(T number, T place, T inner, T size, T stride) {
      return number + place / inner % size * stride;
    })

/// What Philox makes of the counter (block, 0), see philox.h.
SHARDTENSOR_CUDA_KERNEL(
    kCounterBlock,
    counter_block,
    template <typename T>
    void counter_block(unsigned long long block, T key, unsigned int* words) {
      using Word = unsigned int;
      using Product = unsigned long long;
      Word word0 = static_cast<Word>(block);
      Word word1 = static_cast<Word>(block >> 32);
      Word word2 = 0;
      Word word3 = 0;
      Word key0 = static_cast<Word>(key);
      Word key1 = static_cast<Word>(static_cast<Product>(key) >> 32);
      for (int round = 0; round < 10; ++round) {
        const Product product0 = Product(0xD2511F53u) * word0;
        const Product product1 = Product(0xCD9E8D57u) * word2;
        word0 = static_cast<Word>(product1 >> 32) ^ word1 ^ key0;
        word2 = static_cast<Word>(product0 >> 32) ^ word3 ^ key1;
        word1 = static_cast<Word>(product1);
        word3 = static_cast<Word>(product0);
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
      }
      words[0] = word0;
      words[1] = word1;
      words[2] = word2;
      words[3] = word3;
    })

/// A word of the block number >> shift: word `place`, two further on where
/// number has a bit of `later`, one further on where it has one of `next`.
SHARDTENSOR_CUDA_KERNEL_AFTER(
    kCounterBlock,
    kCounterWord,
    counter_word,
    template <typename T>
    T counter_word(T number, T key, T shift, T place, T later, T next) {
      unsigned int words[4];
      counter_block(
          static_cast<unsigned long long>(number) >> shift, key, words);
      const T chosen = place + ((number & later) != 0 ? 2 : 0) +
          ((number & next) != 0 ? 1 : 0);
      return chosen == 0 ? words[0]
          : chosen == 1  ? words[1]
          : chosen == 2  ? words[2]
                         : words[3];
    })

/// Of eight numbers, from first + place on, whether their word is less than
/// `bound`: a byte each, the lowest first. All words of a block are used.
SHARDTENSOR_CUDA_KERNEL_AFTER(
    kCounterBlock,
    kCounterBelow,
    counter_below,
    template <typename T>
    T counter_below(T first, T place, T key, T bound) {
      using Product = unsigned long long;
      const Product number = static_cast<Product>(first + place);
      Product below = 0;
      for (Product block = number >> 2; block <= (number + 7) >> 2; ++block) {
        unsigned int words[4];
        counter_block(block, key, words);
        for (int word = 0; word < 4; ++word) {
          const Product byte = 4 * block + word - number; // large: before them
          if (byte < 8 && static_cast<T>(words[word]) < bound) {
            below |= Product(1) << 8 * byte;
          }
        }
      }
      return static_cast<T>(below);
    })

} // namespace shardtensor::detail
