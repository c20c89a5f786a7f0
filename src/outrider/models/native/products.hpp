// What is multiplied with what.
#pragma once
#include "blocks.hpp"

template <class T> struct Product {
    const Matrix &w, &then;  // then: what is read next
    Inputs<T>& x;
    int rows;  // of x
};
// One of several products that are handed out together
template <class T> struct OneOf {
    const Matrix* w;
    Inputs<T>* x;
    int rows;
};
